"""The wire contract of kvferry: `.proto` files and the stubs generated from them."""
