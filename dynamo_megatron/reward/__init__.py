"""Verifiable rewards: verifiers, the processes they run in, and a control experiment.

What every worker process imports (this file, ``verification``, ``wire``, ``worker``) uses the
standard library alone, so that a worker starts in well under a second; math-verify and
reasoning-gym are imported by the workers whose verifier needs them.
"""
