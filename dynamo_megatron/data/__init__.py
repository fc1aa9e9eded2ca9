"""From files and generators to tokenised prompts in a seeded, resumable order."""
