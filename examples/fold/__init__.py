"""Models of Looks et al. 2017 (section 3, appendices A and B) and of Fold's examples folder, as blocks."""
