"""What the benchmark scripts share: environments, the runner, statistics, plots and tables."""
