# Connects to the server beside it: PGHOST, PGUSER and PGDATABASE are set.
set -e
psql -X -v ON_ERROR_STOP=1 -c "\\copy product FROM '$HOLDFAST_INPUTS/shop/products.csv' WITH (FORMAT csv)"
psql -X -v ON_ERROR_STOP=1 -c "
  INSERT INTO sale (product_id, sold_at)
  SELECT 1 + n % 4, timestamptz '2026-01-01' + n * interval '1 minute' FROM generate_series(1, 10000) AS n"
