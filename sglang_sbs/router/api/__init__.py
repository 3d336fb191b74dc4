"""The HTTP surface: routes, access control, and all endpoints except inference."""
