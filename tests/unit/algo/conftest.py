"""Property tests that do not depend on the speed of the machine, nor on luck."""

from hypothesis import settings

# No deadline: a busy machine is not a failure. Derandomised: a red run is red for everyone.
settings.register_profile("steady", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("steady")
