"""What `tierstore.integrations.megatron` is made of."""
