-- The ledger: at most one row for a job and a period, which is its planned time (see ledger/).
create table {{cookiecutter.project_slug}}.job_run (
    job text not null check (job <> ''),
    period timestamptz not null,
    state text not null check (state in ('running', 'retry', 'succeeded', 'failed', 'skipped')),
    attempt integer not null default 0 check (attempt >= 0),
    role text, -- whose lease `epoch` belongs to; both null where no lease was held
    epoch bigint check ((epoch is null) = (role is null)),
    instance text,
    started_at timestamptz, -- of the last attempt
    finished_at timestamptz,
    retry_at timestamptz check ((retry_at is not null) = (state = 'retry')),
    error text, -- of the last attempt that failed
    primary key (job, period)
);

-- What a new leader has to look at first: claims left behind, and attempts to repeat.
create index job_run_unfinished on {{cookiecutter.project_slug}}.job_run (job, period) where state in ('running', 'retry');

-- The retention sweep goes by age.
create index job_run_period on {{cookiecutter.project_slug}}.job_run (period);

-- What is declared and when it is due, kept up to date by whoever runs the jobs, for those who look from outside.
create table {{cookiecutter.project_slug}}.job (
    name text primary key check (name <> ''),
    role text not null, -- the worker whose code declares it
    schedule text not null,
    next_period timestamptz not null -- the first planned time that has not begun: overdue once it has passed
);

-- Whether nobody works on a run any more: its term has ended in order, its role has had a later one since, or, where no
-- lease was held, the session that runs it has ended.
create function {{cookiecutter.project_slug}}.is_abandoned(run {{cookiecutter.project_slug}}.job_run) returns boolean
language sql stable
return (run).state = 'running' and case
    when (run).epoch is not null
    then exists (
        select from {{cookiecutter.project_slug}}.lease
        where lease.role = (run).role
            and (lease.epoch > (run).epoch or (lease.epoch = (run).epoch and lease.released_at is not null))
    )
    else not exists (
        select from pg_stat_activity as session
        where session.datname = current_database()
            and session.application_name = '{{cookiecutter.project_slug}} ' || (run).instance
    )
end;
