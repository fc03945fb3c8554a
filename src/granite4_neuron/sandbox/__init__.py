"""Programs that run in processes of their own with little memory, and threads with a budget of processor time."""
