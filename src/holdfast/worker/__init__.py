"""Workers: they claim jobs, run them, and say how they ended."""
