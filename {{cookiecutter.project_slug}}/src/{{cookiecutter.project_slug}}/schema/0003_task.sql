-- The queue: rows are put in by task.enqueue() in the caller's transaction, and run by whoever leads.
--
-- waiting -> running -> done        never tried so far; then as it should be
--            running -> retry       it raised, or was put back: due again at run_at
--            running -> abandoned   its leader ended during the attempt: due again at run_at, one such task at a time
--            running -> dead        no attempt is left; it stays, with its error, until somebody has looked at it
create table {{cookiecutter.project_slug}}.task (
    id bigint generated always as identity primary key,
    kind text not null check (kind <> ''),
    payload jsonb not null default '{}',
    key text, -- at most one task of a kind that is not running has it
    state text not null default 'waiting'
        check (state in ('waiting', 'retry', 'abandoned', 'running', 'done', 'dead')),
    run_at timestamptz not null default now(),
    attempts integer not null default 0 check (attempts >= 0),
    epoch bigint, -- of the leader that took it last
    error text, -- of the last attempt that failed
    created_at timestamptz not null default now(),
    finished_at timestamptz check ((finished_at is not null) = (state in ('done', 'dead')))
) with (
    -- The index of what is due collects dead entries at its head; with the default, a fifth of the table, it grew slower
    -- between two vacuums.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_analyze_scale_factor = 0.02
);

-- Each index holds only rows in some states, so it stays small however many are done.

-- What is due, kind by kind: tasks of one kind never stand in the way of another's, nor do kinds that no release knows.
create index task_due on {{cookiecutter.project_slug}}.task (kind, run_at, id) where state in ('waiting', 'retry');

-- Deduplication. A task that is tried again does not return to 'waiting', so it can't collide with one put in meanwhile.
create unique index task_waiting_key on {{cookiecutter.project_slug}}.task (kind, key)
where key is not null and state = 'waiting';
create index task_again_key on {{cookiecutter.project_slug}}.task (kind, key)
where key is not null and state in ('retry', 'abandoned');

-- The exceptions: few rows, each worth a look.
create index task_exception on {{cookiecutter.project_slug}}.task (state, run_at, id)
where state in ('running', 'abandoned', 'dead');

-- The retention sweep: done tasks by age.
create index task_done on {{cookiecutter.project_slug}}.task (finished_at) where state = 'done';

-- The first task of each kind that waits: one index probe a kind, however many tasks there are.
create view {{cookiecutter.project_slug}}.task_head as
with recursive head as (
    (
        select kind, run_at from {{cookiecutter.project_slug}}.task
        where state in ('waiting', 'retry') order by kind, run_at limit 1
    )
    union all
    select next.kind, next.run_at
    from head cross join lateral (
        select kind, run_at from {{cookiecutter.project_slug}}.task
        where state in ('waiting', 'retry') and kind > head.kind order by kind, run_at limit 1
    ) as next
)
select kind, run_at from head;
