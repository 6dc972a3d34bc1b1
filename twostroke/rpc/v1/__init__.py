"""Generated from proto/twostroke/rpc/v1 by `make proto`; do not edit."""
