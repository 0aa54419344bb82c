-- revision: 1
CREATE OR REPLACE FUNCTION holdfast.new_id() RETURNS uuid
LANGUAGE sql VOLATILE AS $$
  SELECT encode(
    set_bit(
      set_bit(
        overlay(
          uuid_send(gen_random_uuid())
          PLACING substring(int8send(floor(extract(epoch FROM holdfast.clock()) * 1000)::bigint) FROM 3)
          FROM 1 FOR 6
        ),
        52, 1
      ),
      53, 1
    ),
    'hex'
  )::uuid
$$;
COMMENT ON FUNCTION holdfast.new_id() IS 'A UUIDv7: milliseconds, then random bits.';
