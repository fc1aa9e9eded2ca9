"""Seeds of rollouts."""

from dynamo_megatron.rollout.seeds import rollout_seed


def test_the_seed_is_pinned():
    # blake2b of repr((3, 14, 'abc', 2)), first 8 bytes big-endian, shifted right by one:
    # python -c "import hashlib; print(hashlib.blake2b(b\"(3, 14, 'abc', 2)\", digest_size=8)
    #            .hexdigest())" gives d8cefa3fe6d54145.
    assert rollout_seed(3, 14, "abc", 2) == 0xD8CEFA3FE6D54145 >> 1


def test_seeds_of_a_large_step_are_distinct_and_fit_63_bits():
    seeds = [
        rollout_seed(run, step, f"p{prompt}", k)
        for run in (0, 1)
        for step in (0, 1)
        for prompt in range(500)
        for k in range(16)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_fields_do_not_run_into_each_other():
    assert rollout_seed(1, 23, "4", 5) != rollout_seed(12, 3, "4", 5)
    assert rollout_seed(1, 2, "34", 5) != rollout_seed(1, 2, "3", 45)
    assert rollout_seed(1, 2, "3', 4", 5) != rollout_seed(1, 2, "3", 45)
