CREATE TABLE product (
  id integer PRIMARY KEY,
  name text NOT NULL,
  price numeric(10, 2) NOT NULL CHECK (price >= 0)
);

CREATE TABLE sale (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  product_id integer NOT NULL REFERENCES product,
  sold_at timestamptz NOT NULL
);
