\ir 001_stock.sql
\ir 002_sold.sql
