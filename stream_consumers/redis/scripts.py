"""What happens to a Redis group in one step: scripts, since in between two commands somebody else may come.

Each is for one key, so that they work on a cluster, too.
"""

from __future__ import annotations

COUNT = """
-- How many of at most ARGV[3] entries there are from ARGV[1] to ARGV[2], and the id of the last one.
local entries = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', ARGV[3])
return {#entries, #entries > 0 and entries[#entries][1]}
"""

CLAIM_NEW = """
-- Give at most ARGV[4] new entries up to the id ARGV[3], of at most ARGV[5] bytes (with ARGV[6], one whatever its size)
-- to the name ARGV[2] of group ARGV[1]. Nothing is given while entries that were trimmed unread are not accounted for.
-- Nor is anything given in a group without the mark ARGV[7]: its mode was switched. Returns {is full, is trimmed,
-- bytes, ids}.
local key, group, name = KEYS[1], ARGV[1], ARGV[2]
if redis.call('XGROUP', 'CREATECONSUMER', key, group, ARGV[7]) == 1 then
  redis.call('XGROUP', 'DELCONSUMER', key, group, ARGV[7])
  return redis.error_reply('UNCLAIMED the mark of the group is gone')
end
local function fields(reply)
  local found = {}
  for place = 1, #reply, 2 do found[reply[place]] = reply[place + 1] end
  return found
end
local at
for _, listed in ipairs(redis.call('XINFO', 'GROUPS', key)) do
  local info = fields(listed)
  if info['name'] == group then at = info end
end
if not at then return redis.error_reply('NOGROUP no such group ' .. group) end
local last = at['last-delivered-id']
if #redis.call('XRANGE', key, '-', last, 'COUNT', 1) == 0 and at['entries-read'] then
  local info = fields(redis.call('XINFO', 'STREAM', key))
  local added = info['entries-added']
  if added and added - at['entries-read'] > info['length'] then return {0, 1, 0, {}} end
end
local room, bytes, count, full, place, left = tonumber(ARGV[5]), 0, 0, 0, '(' .. last, tonumber(ARGV[4])
while left > 0 and full == 0 do
  -- In small pages: what does not fit need not be in memory.
  local page = redis.call('XRANGE', key, place, ARGV[3], 'COUNT', math.min(left, 100))
  if #page == 0 then break end
  for _, entry in ipairs(page) do
    local size = 0
    for field = 2, #entry[2], 2 do size = size + #entry[2][field] end
    if bytes + size > room and not (count == 0 and ARGV[6] == '1') then full = 1 break end
    bytes, count = bytes + size, count + 1
  end
  left, place = left - #page, '(' .. page[#page][1]
end
if count == 0 then return {full, 0, 0, {}} end
local ids = {}
for _, entry in ipairs(redis.call('XREADGROUP', 'GROUP', group, name, 'COUNT', count, 'STREAMS', key, '>')[1][2]) do
  ids[#ids + 1] = entry[1]
end
if at['entries-read'] then
  -- Redis gives up counting where an entry was deleted ahead, and with that what tells of losses.
  redis.call('XGROUP', 'SETID', key, group, ids[#ids], 'ENTRIESREAD', at['entries-read'] + #ids)
end
return {full, 0, bytes, ids}
"""

TAKE_OVER = """
-- Move those of the entries ARGV[9..] that the name ARGV[2] holds, idle for ARGV[4] ms, to the name ARGV[3]. With
-- ARGV[7] the deliveries before do not count: they were to clients of another kind.
-- Returns {is full, bytes, ids that were moved, ids that are not in the stream any more and stay where they are}.
local key, group, from, to = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
if redis.call('XGROUP', 'CREATECONSUMER', key, group, ARGV[8]) == 1 then
  redis.call('XGROUP', 'DELCONSUMER', key, group, ARGV[8])
  return redis.error_reply('UNCLAIMED the mark of the group is gone')
end
local idle, room, bytes, full, moved, gone = tonumber(ARGV[4]), tonumber(ARGV[5]), 0, 0, {}, {}
for place = 9, #ARGV do
  local id = ARGV[place]
  local held = redis.call('XPENDING', key, group, id, id, 1)[1]
  if held and held[2] == from and held[3] >= idle then
    local entry = redis.call('XRANGE', key, id, id)[1]
    if not entry then
      gone[#gone + 1] = id
    else
      local size = 0
      for field = 2, #entry[2], 2 do size = size + #entry[2][field] end
      if bytes + size > room and not (#moved == 0 and ARGV[6] == '1') then full = 1 break end
      if ARGV[7] == '1' then
        redis.call('XCLAIM', key, group, to, 0, id, 'RETRYCOUNT', 1)
      else
        redis.call('XCLAIM', key, group, to, 0, id)
      end
      bytes, moved[#moved + 1] = bytes + size, id
    end
  end
end
return {full, bytes, moved, gone}
"""

TOUCH = """
-- The heartbeat: what the name ARGV[2] still holds, from ARGV[3] on, is idle no more; one page. Returns the next place.
-- Entries that were trimmed are left alone: XCLAIM would drop them, and with them what tells that they are lost; so the
-- name itself is touched, too, by asking for nothing.
redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', 1, 'STREAMS', KEYS[1], '18446744073709551615-0')
local page = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], '+', ARGV[4], ARGV[2])
if #page == 0 then return false end
local command = {'XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0}
for _, held in ipairs(page) do
  if #redis.call('XRANGE', KEYS[1], held[1], held[1]) > 0 then command[#command + 1] = held[1] end
end
if #command > 5 then
  command[#command + 1] = 'JUSTID'
  redis.call(unpack(command))
end
return '(' .. page[#page][1]
"""

RELEASE = """
-- What the name ARGV[2] holds, from ARGV[3] on, is for anybody to take at once, as if this delivery had not been.
local page = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], '+', ARGV[4], ARGV[2])
if #page == 0 then return false end
for _, held in ipairs(page) do
  if #redis.call('XRANGE', KEYS[1], held[1], held[1]) > 0 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, held[1], 'IDLE', ARGV[5], 'RETRYCOUNT',
      math.max(0, held[4] - 1), 'JUSTID')
  end
end
return '(' .. page[#page][1]
"""

FORGET = """
-- Remove the name ARGV[2] unless it holds something.
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then return 0 end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
return 1
"""

CREATE_GROUP = """
-- Make the group ARGV[1] at ARGV[2] ('0' or '$'), and the stream. What was never the group's does not count as lost.
local info, read = redis.pcall('XINFO', 'STREAM', KEYS[1]), 0
if info.err and not string.find(info.err, 'no such key') then return info end
if not info.err then
  local found = {}
  for place = 1, #info, 2 do found[info[place]] = info[place + 1] end
  if not found['entries-added'] then return redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1], ARGV[2]) end
  read = found['entries-added'] - (ARGV[2] == '$' and 0 or found['length'])
end
return redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1], ARGV[2], 'MKSTREAM', 'ENTRIESREAD', read)
"""

ACCOUNT = """
-- Entries that were trimmed unread are accounted for: unless somebody was faster, the group counts them as read.
-- ARGV: group, where it was, what it had counted (empty if it did not know), what it counts from here on.
for _, listed in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local info = {}
  for place = 1, #listed, 2 do info[listed[place]] = listed[place + 1] end
  local read = info['entries-read'] or ''
  if info['name'] == ARGV[1] and info['last-delivered-id'] == ARGV[2] and tostring(read) == ARGV[3] then
    redis.call('XGROUP', 'SETID', KEYS[1], ARGV[1], ARGV[2], 'ENTRIESREAD', ARGV[4])
    return 1
  end
end
return 0
"""

SET_POSITION = """
-- Set the group ARGV[1] to the id ARGV[3] (and the count ARGV[4]), unless its entries are claimed one by one, which the
-- name ARGV[2] marks: a late run of another mode would deliver entries a second time. With ARGV[5] the switch itself
-- does it, and marks it.
local made = redis.call('XGROUP', 'CREATECONSUMER', KEYS[1], ARGV[1], ARGV[2])
if made == 0 and ARGV[5] == '0' then return 0 end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
local command = {'XGROUP', 'SETID', KEYS[1], ARGV[1], ARGV[3]}
if ARGV[4] ~= '' then command[6], command[7] = 'ENTRIESREAD', ARGV[4] end
redis.call(unpack(command))
if ARGV[5] == '1' then redis.call('XGROUP', 'CREATECONSUMER', KEYS[1], ARGV[1], ARGV[2]) end
return 1
"""
