"""holdfast: a durable execution queue and worker runtime. Your database is the queue; your jobs outlive your workers.

General layout: `model`, `errors`, `timing` and `submission` are plain values; `store` is the only place that knows SQL;
`duties` are the periodic chores; `cli` is the command line. Data flows one way, and imports point down only.
"""

__version__ = "0.1.0"
