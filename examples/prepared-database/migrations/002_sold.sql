CREATE VIEW sold AS
SELECT p.name, count(*) AS sales, sum(p.price) AS revenue
FROM sale AS s
JOIN product AS p ON p.id = s.product_id
GROUP BY p.name;
