"""What looks at runs. Four rooms in the order of the data: following, figures, web and report. None loads torch."""
