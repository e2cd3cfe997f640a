-- The queue: rows are put in by task.enqueue() in the caller's transaction and taken out by the poller.
create table {{cookiecutter.project_slug}}.task (
    id bigint generated always as identity primary key,
    kind text not null check (kind <> ''),
    payload jsonb not null default '{}',
    key text, -- at most one live task of a kind has it
    state text not null default 'waiting' check (state in ('waiting', 'running', 'unhandled', 'done', 'dead')),
    run_at timestamptz not null default now(),
    attempts integer not null default 0 check (attempts >= 0),
    epoch bigint, -- of the leader that took it last
    error text, -- of the last attempt that failed
    created_at timestamptz not null default now(),
    finished_at timestamptz
);

-- What is due, in order: this index holds waiting rows only, so it stays small however many are done.
create index task_due on {{cookiecutter.project_slug}}.task (run_at, id) where state = 'waiting';

create unique index task_live_key on {{cookiecutter.project_slug}}.task (kind, key)
where key is not null and state in ('waiting', 'running', 'unhandled');

-- Tasks that wait for a release which knows their kind.
create index task_unhandled on {{cookiecutter.project_slug}}.task (kind) where state = 'unhandled';

-- The retention sweep: done tasks by age.
create index task_done on {{cookiecutter.project_slug}}.task (finished_at) where state = 'done';
