"""What a fleet would have done with a trace: the production router over simulated replicas, in simulated time."""
