"""Training a drafter: data, cached features, anchors, objective, trainer."""
