"""Plan, place and run one training step."""
