"""Works out, from what lies on disk and what is known of the devices, what each rank of a new start has to read."""
