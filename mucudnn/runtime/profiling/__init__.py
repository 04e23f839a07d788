"""What nodes, links and mappings take on a device, measured."""
