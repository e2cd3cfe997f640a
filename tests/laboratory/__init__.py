"""A laboratory for leases: real servers, real replicas as processes, a recorder and a checker.

`servers` starts PostgreSQL and PgBouncer, `service` a baked and installed project whose workers record what they do,
`record` reads the records and answers whether two ever worked at once.
"""
