"""Verifiable rewards: verifiers, the processes they run in, and a control experiment.

Everything a worker process imports (this file, ``verification``, ``integer_answer``, ``wire``,
``worker``) uses the standard library alone, so that a worker starts in well under a second.
"""
