"""Values that every wing uses: Strategy, Plan, Request, facts, errors, units. No I/O."""
