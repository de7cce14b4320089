"""The three scripts that run inside Redis, each in one atomic step.

Names, all behind one hash tag: `life` (hash: nonce of the log, newest position), `log` (stream; entry n has the ID n-0, so
a missing position shows), `pools` (set of names), and per pool `fence:NAME` (hash: incarnation, epoch, seq, at) and
`snapshot:NAME` (list: position it was taken at, head, chunks of keys). A snapshot is filled as
`upload:NAME:epoch` first.

Nonces are compared as text, because Lua's numbers are doubles. Every answer is {status, number}: "ok" with the newest
position, "seq" with the number expected, or the reason of a refusal.

A log without its `life` (somebody removed it) is worth nothing: the next to open begins a new one, and positions known of the
old one go with the fences of all pools, which open anew.

Fence and snapshot live for the retention; opening, heartbeats and new snapshots renew it.

Limits: Redis 6.2 commands. OPEN also touches the fences of other pools, whose names it finds in `pools`: fine on one
server, not on Redis Cluster.
"""

from __future__ import annotations

from typing import Final

_FENCE: Final = """
local fence = redis.call('HMGET', KEYS[2], 'incarnation', 'epoch', 'seq')
if not fence[1] or redis.call('EXISTS', KEYS[1]) == 0 then return {'unknown', 0} end
if fence[1] ~= ARGV[1] then return {'incarnation', 0} end
if fence[2] ~= ARGV[2] then return {'epoch', 0} end
"""

WRITE: Final = (
    _FENCE
    + """
local expected = tonumber(fence[3])
if ARGV[4] == 'batch' then expected = expected + 1 end
if tonumber(ARGV[3]) ~= expected then return {'seq', expected} end
if ARGV[4] == 'gone' then
  redis.call('DEL', KEYS[2], KEYS[3])
  redis.call('SREM', KEYS[5], ARGV[8])
elseif ARGV[4] == 'batch' then
  redis.call('HSET', KEYS[2], 'seq', ARGV[3])
else
  redis.call('PEXPIRE', KEYS[2], ARGV[6])
  redis.call('PEXPIRE', KEYS[3], ARGV[6])
  redis.call('SADD', KEYS[5], ARGV[8])
end
local position = redis.call('HINCRBY', KEYS[1], 'newest', 1)
redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[7], string.format('%d-0', position), 'e', ARGV[5])
return {'ok', position}
"""
)
"""Appends an entry. KEYS life, fence, snapshot, log, pools.

ARGV incarnation, epoch, seq, kind, entry, retention in ms, entries of the log, name of the pool.
"""

OPEN: Final = """
if redis.call('EXISTS', KEYS[6]) == 0 then return {'upload', 0} end
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('DEL', KEYS[4])
  for _, name in ipairs(redis.call('SMEMBERS', KEYS[5])) do redis.call('DEL', ARGV[6] .. name) end
  redis.call('HSET', KEYS[1], 'nonce', ARGV[4], 'newest', '0')
end
local newest = redis.call('HGET', KEYS[1], 'newest')
redis.call('HSET', KEYS[2], 'incarnation', ARGV[1], 'epoch', ARGV[2], 'seq', ARGV[3], 'at', newest)
redis.call('LPUSH', KEYS[6], newest)
redis.call('RENAME', KEYS[6], KEYS[3])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
redis.call('PEXPIRE', KEYS[3], ARGV[5])
for _, name in ipairs(redis.call('SMEMBERS', KEYS[5])) do
  if redis.call('EXISTS', ARGV[6] .. name) == 0 then redis.call('SREM', KEYS[5], name) end
end
redis.call('SADD', KEYS[5], ARGV[7])
return {'ok', tonumber(newest)}
"""
"""Takes a fence and stores its snapshot. KEYS life, fence, snapshot, log, pools, uploaded snapshot.

ARGV incarnation, epoch, seq, nonce for a new log, retention in ms, what names of fences begin with, name of the pool.
"""

REPLACE: Final = (
    _FENCE
    + """
if tonumber(ARGV[3]) ~= tonumber(fence[3]) then return {'seq', tonumber(fence[3])} end
if redis.call('EXISTS', KEYS[4]) == 0 then return {'upload', 0} end
local newest = redis.call('HGET', KEYS[1], 'newest')
redis.call('LPUSH', KEYS[4], newest)
redis.call('RENAME', KEYS[4], KEYS[3])
redis.call('PEXPIRE', KEYS[3], ARGV[4])
redis.call('HSET', KEYS[2], 'at', newest)
return {'ok', tonumber(newest)}
"""
)
"""Replaces a snapshot. KEYS life, fence, snapshot, uploaded snapshot. ARGV incarnation, epoch, seq, retention in ms."""
