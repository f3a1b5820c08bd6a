"""What `tierstore.integrations.deepspeed` is made of."""
