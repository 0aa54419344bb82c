"""Workers: they claim jobs, run them and record how they ended."""
