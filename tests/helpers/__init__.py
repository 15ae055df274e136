"""What several tests share: tiny corpora, models and runs, ranks, a browser, and a SLURM cluster."""
