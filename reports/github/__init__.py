"""Reports for GitHub Actions: step summaries and annotations."""
