"""Messages between processes: generated code (v1), conversions, the server funnel and client channels."""
