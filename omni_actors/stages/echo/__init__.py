"""The ``echo`` engine: repeats its input at a configurable cost, for tests and benchmarks (see ``engine``)."""
