"""What a run writes for people: metrics, plots, sampled responses, progress and logs."""
