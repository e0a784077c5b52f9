"""Deliveries of a Redis group that take more than one command: scripts, since somebody else may come in between.

KEYS: the stream, and the hash with the time in milliseconds at which entries were received first. It is written only
where an entry is touched or delivered again, because until then Redis itself still knows. ARGV: group, consumer, ….
"""

from __future__ import annotations

_RECEIVED = """
local key, times, group, consumer = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function first(id, idle)
  redis.call('HSETNX', times, id, string.format('%.0f', now - idle))
  redis.call('PEXPIRE', times, 604800000)
  return redis.call('HGET', times, id)
end
-- Entries that were removed are left pending: XCLAIM would drop them, and with them what tells that they are lost.
local function deliver(held)
  local id = held[1]
  local received = first(id, held[3])
  if #redis.call('XRANGE', key, id, id) == 0 then return {id, held[4], received, false} end
  local claimed = redis.call('XCLAIM', key, group, consumer, 0, id)[1]
  return {id, held[4] + 1, received, claimed[2]}
end
"""

RECLAIM = f"""
-- Deliver to the consumer at most ARGV[5] entries idle for ARGV[3] ms, looking at ARGV[6] of them from ARGV[4] on.
-- Returns {{where to go on or '' at the end, now, {{id, deliveries, first received, fields}} of each}}.
{_RECEIVED}
local page = redis.call('XPENDING', key, group, ARGV[4], '+', ARGV[6])
local found, place = {{}}, ''
for _, held in ipairs(page) do
  if #found == tonumber(ARGV[5]) then break end
  place = '(' .. held[1]
  if held[3] >= tonumber(ARGV[3]) then found[#found + 1] = deliver(held) end
end
if #page < tonumber(ARGV[6]) and (#page == 0 or place == '(' .. page[#page][1]) then place = '' end
return {{place, now, found}}
"""

REDELIVER = f"""
-- Deliver the entry ARGV[3] once more to the consumer, if it holds it. Returns as RECLAIM.
{_RECEIVED}
local held = redis.call('XPENDING', key, group, ARGV[3], ARGV[3], 1, consumer)[1]
return {{'', now, held and {{deliver(held)}} or {{}}}}
"""

TOUCH_ENTRIES = f"""
-- Those of the entries ARGV[3..] that the consumer holds are idle no more.
{_RECEIVED}
local touched = 0
for place = 3, #ARGV do
  local id = ARGV[place]
  local held = redis.call('XPENDING', key, group, id, id, 1, consumer)[1]
  if held and #redis.call('XRANGE', key, id, id) > 0 then
    first(id, held[3])
    redis.call('XCLAIM', key, group, consumer, 0, id, 'JUSTID')
    touched = touched + 1
  end
end
return touched
"""
