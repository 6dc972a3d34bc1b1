"""A draft model beside the model of a decode worker."""
