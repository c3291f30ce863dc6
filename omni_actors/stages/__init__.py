"""The stage engines: the model code that a worker runs, and what the parent must know of it.

Where the modules run:

========================================== ==========================================================================
``base``                                   both processes: the protocol that every engine implements (start here)
``registry``, ``*.options``, ``bounds``    the parent: which engines there are, which options and parameters they take
``assets``, ``memory``                     the parent: where model files are, how much memory a model needs
everything else                            a worker: one package per model family, imported by the worker only
========================================== ==========================================================================

The parent must start quickly and needs no model library, so none of its modules imports torch.

To add an engine:

1. Make a package ``stages/<name>/``. Its ``__init__`` contains a docstring only.
2. ``<name>/options.py`` declares the engine's options and request parameters as msgspec structs. It imports no model
   library. Give every number two bounds (see ``bounds``).
3. ``<name>/engine.py`` implements ``base.StageEngine``, which shows a small example. A base class
   in ``engine`` can keep the records of its requests. Add a case to tests/support/engine_cases/.
4. Add one row to ``registry.ENGINES``.

An engine outside this package needs no row: a configuration names it by import path ("package.module:factory").
"""
