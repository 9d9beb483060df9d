"""The meeting point of a federation: HTTPS service, store, rounds, aggregation worker, administration.

The process that serves imports `edgefl_protocol` only; `worker` runs in a process of its own and imports the trainer.
"""
