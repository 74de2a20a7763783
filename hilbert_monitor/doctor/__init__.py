"""What ``hilbert-monitor doctor`` checks: a claim a file, each on the machine at hand, with what says otherwise."""
