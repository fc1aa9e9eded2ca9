"""Rollouts from vLLM replicas, each in a Ray actor of its own process and placement.

``engine`` is what the trainer talks to. ``schedule`` decides what is sampled where, ``dispatch``
carries it out and survives lost replicas, ``replica`` is the actor, ``worker`` runs inside vLLM,
``transport`` brings the weights there, ``cluster`` starts Ray.
"""
