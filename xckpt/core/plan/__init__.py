"""Who writes what and who reads what: items, plans, planners and the checks on them."""
