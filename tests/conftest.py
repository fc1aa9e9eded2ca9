"""Before any test module is imported: let megatron-core run on this host."""

import megatron_patches

megatron_patches.apply()
