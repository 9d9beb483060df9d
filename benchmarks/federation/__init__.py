"""What a federation gives its sites, from the scores of finished runs, beside what a site reaches alone."""
