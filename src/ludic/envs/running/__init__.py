"""What calls environments and holds them to their contract."""
