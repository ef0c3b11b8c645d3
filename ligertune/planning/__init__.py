"""Planning: turn a recipe into a Plan, the frozen values that a run follows."""
