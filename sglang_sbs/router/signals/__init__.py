"""What engines say by themselves: EndForward and KV events, received and bound to workers."""
