-- Why somebody asked a running job to stop. The end that the request leads to repeats it in its error message.

ALTER TABLE holdfast.jobs ADD COLUMN stop_reason text;
