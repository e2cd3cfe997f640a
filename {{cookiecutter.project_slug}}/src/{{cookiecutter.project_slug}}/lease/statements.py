"""Every statement that runs on the lease's session, but for those of the probe."""

SCHEMA_VERSION = "select max(version) from {{ cookiecutter.project_slug }}.migration"

CONFIGURE = "select set_config(name, value, false) from unnest(%(names)s::text[], %(values)s::text[]) as s(name, value)"
READ_BACK = "select name, setting from pg_settings where name = any(%(names)s)"
CANARY = "{{ cookiecutter.project_slug }}.canary"

ENROL = """
insert into {{ cookiecutter.project_slug }}.lease (key, role, timeline, released_at)
select key, role, 1, clock_timestamp() from unnest(%(keys)s::bigint[], %(roles)s::text[]) as k(key, role)
on conflict (key) do nothing
"""  # on timeline 1 no fail-over ever happened, so no row means no predecessor; on a later one it proves nothing

# One statement for all roles: is the session still ours, which locks does it hold, and a try for the rest. A lock is
# attempted only where the session proves itself in the same statement, and is confirmed in pg_locks, never by locking
# again, which stacks. pg_stat_get_activity(0) finds nobody; of NULL it would return every session.
HEARTBEAT = """
with me as materialized (
    select pg_backend_pid() = %(pid)s
           and current_setting('{{ cookiecutter.project_slug }}.canary', true) is not distinct from %(canary)s as same,
           pg_is_in_recovery() as recovering
), locks as materialized (
    select objid::bigint as key, pid from pg_locks
     where locktype = 'advisory' and mode = 'ExclusiveLock' and granted
       and classid = 0 and objsubid = 1 and objid::bigint = any(%(keys)s)
       and database = (select oid from pg_database where datname = current_database())
)
select me.same, me.recovering,
       case when %(read_timeline)s and not me.recovering
            then ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint end as timeline,
       wanted.key, locks.pid,
       case when me.same and not me.recovering and wanted.key = any(%(tries)s) and locks.pid is null
            then pg_try_advisory_lock(wanted.key) else false end as won,
       activity.application_name, lease.epoch,
       extract(epoch from activity.state_change)::float8 as heard
  from me
 cross join unnest(%(keys)s::bigint[]) as wanted (key)
  left join locks on locks.key = wanted.key
  left join {{ cookiecutter.project_slug }}.lease on lease.key = wanted.key
  left join lateral pg_stat_get_activity(coalesce(locks.pid, 0)) as activity on true
"""

READ = """
select epoch, holder, pid, trust_seconds, horizon_seconds, fenced, timeline, released_at is not null
  from {{ cookiecutter.project_slug }}.lease where key = %(key)s
"""

# The next epoch rises even where a fail-over lost the last one: each timeline has a range of its own.
BEGIN = """
with mine as (
    select key from {{ cookiecutter.project_slug }}.lease
     where key = %(key)s
       and pg_backend_pid() = %(pid)s
       and current_setting('{{ cookiecutter.project_slug }}.canary', true) is not distinct from %(canary)s
       and not pg_is_in_recovery()
       and exists (select from pg_locks
                    where locktype = 'advisory' and mode = 'ExclusiveLock' and granted
                      and classid = 0 and objsubid = 1 and objid::bigint = %(key)s and pid = pg_backend_pid()
                      and database = (select oid from pg_database where datname = current_database()))
       for update skip locked
)
update {{ cookiecutter.project_slug }}.lease
   set epoch = greatest(lease.epoch, (%(timeline)s::bigint - 1) << 32) + 1,
       role = %(role)s, holder = %(holder)s, pid = pg_backend_pid(), fenced = %(fenced)s,
       ttl_seconds = %(ttl)s, trust_seconds = %(trust)s, horizon_seconds = %(horizon)s,
       timeline = %(timeline)s, acquired_at = clock_timestamp(), released_at = null
  from mine where lease.key = mine.key
returning lease.epoch
"""

MARK_RELEASED = """
update {{ cookiecutter.project_slug }}.lease set released_at = clock_timestamp()
 where key = %(key)s and epoch = %(epoch)s and holder = %(holder)s
"""

UNLOCK = "select pg_advisory_unlock(%(key)s), pg_notify(%(channel)s, %(payload)s)"
