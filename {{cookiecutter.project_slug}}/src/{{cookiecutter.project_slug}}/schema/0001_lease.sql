-- One row a role, written by whoever leads it. The elector inserts it on first use, so a new role needs no migration.
create table {{cookiecutter.project_slug}}.lease (
    key bigint primary key check (key between 1 and 4294967295), -- the advisory lock: pg_locks.objid shows it as it is
    role text not null check (role <> ''),
    epoch bigint not null default 0 check (epoch >= 0), -- the fencing token: each term has a higher one
    holder text, -- instance that leads or led last
    pid integer, -- backend of its lease session
    ttl_seconds double precision check (ttl_seconds > 0), -- what this holder promised; a successor goes by it
    trust_seconds double precision check (trust_seconds >= 0),
    horizon_seconds double precision check (horizon_seconds >= 0),
    fenced boolean not null default false, -- whether all of this holder's writes are fenced
    timeline bigint, -- of the server that wrote the row: on another one it may be stale
    acquired_at timestamptz,
    released_at timestamptz -- null: not released, or ended without saying so
);
