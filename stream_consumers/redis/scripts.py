"""Lua scripts for operations that must be atomic, because other clients may act between two commands.

The first key is the stream; a second key is in the same slot, so the scripts also work on a cluster. Scripts for a
group have its name as the first argument.
"""

from __future__ import annotations

from stream_consumers.batches import HEADER_BYTES

# Lua: convert a flat reply of names and values to a table.
_FIELDS = """
local function fields(reply)
  local found = {}
  for index = 1, #reply, 2 do found[reply[index]] = reply[index + 1] end
  return found
end
"""
# Lua: check for a count that Lua may have rounded, because its numbers are doubles. Redis goes on with such a count
# itself, and only Python compares it.
_IS_INEXACT = """
local function is_inexact(count) return count and count > 2 ^ 53 end
"""
# Lua: what the names and values of an entry count. Each field but the message counts as a header.
_SIZE = f"""
local function size_of(entry)
  local size = {HEADER_BYTES} * (#entry[2] / 2 - 1)
  for index = 1, #entry[2] do size = size + #entry[2][index] end
  return size
end
"""
# How many bytes of entries a call of a script reads, and one entry more.
_MAX_READ_BYTES = 16 * 1024 * 1024
# Lua: iterate over pages of entries. Pages are small, and get smaller where entries are large, because the server needs
# a multiple of the memory of a page, and answers no other client meanwhile.
_PAGES = f"""
local function pages(key, first, last, most)
  local after, size, left, bytes = first, 1, most, 0
  return function()
    if left <= 0 or bytes > {_MAX_READ_BYTES} then return nil end
    local page = redis.call('XRANGE', key, after, last, 'COUNT', math.min(left, size))
    if #page == 0 then return nil end
    local read = 0
    for _, entry in ipairs(page) do read = read + size_of(entry) end
    size = read * 2 > {_MAX_READ_BYTES // 16} and math.max(1, math.floor(size / 2)) or math.min(100, size * 2)
    left, after, bytes = left - #page, '(' .. page[#page][1], bytes + read
    return page
  end
end
local function is_end(key, read, last)
  return (not read or #redis.call('XRANGE', key, '(' .. read, last, 'COUNT', 1) == 0) and 1 or 0
end
"""
# Lua: check for claim mode, which the consumer `sentinel` marks; without it, the mode was switched, and claims fail.
_CHECK_CLAIM_MODE = """
local function is_in_claim_mode(key, group, sentinel)
  if redis.call('XGROUP', 'CREATECONSUMER', key, group, sentinel) == 0 then return true end
  redis.call('XGROUP', 'DELCONSUMER', key, group, sentinel)
  return false
end
local UNCLAIMED = redis.error_reply('UNCLAIMED the group is not in claim mode')
"""

# Count some of the entries from ARGV[1] to ARGV[2], up to ARGV[3] entries and ARGV[4] bytes (with ARGV[5], at least one
# entry of any size). Returns {entries, bytes, the id of the last one, is full, are all}.
MEASURE_RANGE = (
    _SIZE
    + _PAGES
    + """
local room, bytes, count, last = tonumber(ARGV[4]), 0, 0, false
for page in pages(KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])) do
  for _, entry in ipairs(page) do
    local size = size_of(entry)
    if bytes + size > room and not (count == 0 and ARGV[5] == '1') then return {count, bytes, last, 1, 0} end
    bytes, count, last = bytes + size, count + 1, entry[1]
  end
end
return {count, bytes, last, 0, is_end(KEYS[1], last, ARGV[2])}
"""
)

# Count some of the entries from ARGV[1] to ARGV[2], up to ARGV[3] entries. Returns {entries, the id of the last one,
# are all}.
COUNT = (
    _SIZE
    + _PAGES
    + """
local count, last = 0, false
for page in pages(KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])) do
  count, last = count + #page, page[#page][1]
end
return {count, last, is_end(KEYS[1], last, ARGV[2])}
"""
)

# Deliver at most ARGV[4] new entries up to the id ARGV[3], of at most ARGV[5] bytes (with ARGV[6], at least one entry
# of any size), to the name ARGV[2] of group ARGV[1]. Nothing is delivered while entries that were trimmed unread are
# not accounted for, or while Redis 7 has no possible count to detect them, or if the sentinel ARGV[7] is not in the
# group, or if another client has moved the group: its position is neither ARGV[8] (empty if unknown) nor a pending
# entry, and all members are members in claim mode.
# Returns {is full, is refused, bytes, ids}.
CLAIM_NEW = (
    _FIELDS
    + _IS_INEXACT
    + _SIZE
    + _PAGES
    + _CHECK_CLAIM_MODE
    + """
local key, group, name = KEYS[1], ARGV[1], ARGV[2]
if not is_in_claim_mode(key, group, ARGV[7]) then return UNCLAIMED end
local at
for _, listed in ipairs(redis.call('XINFO', 'GROUPS', key)) do
  local info = fields(listed)
  if info['name'] == group then at = info end
end
if not at then return redis.error_reply('NOGROUP no such group ' .. group) end
local last = at['last-delivered-id']
if ARGV[8] ~= '' and last ~= ARGV[8] and #redis.call('XPENDING', key, group, last, last, 1) == 0 then
  local has_others, pattern = false, '^[^/]+/([1-9]%d*)/' .. string.rep('[0-9a-f]', 32) .. '$'
  for _, listed in ipairs(redis.call('XINFO', 'CONSUMERS', key, group)) do
    local member = fields(listed)['name']
    local number = string.match(member, pattern)
    has_others = has_others or (member ~= ARGV[7] and not (number and #number <= 19))
  end
  if not has_others then return {0, 1, 0, {}} end
end
local info = fields(redis.call('XINFO', 'STREAM', key))
local added, read = info['entries-added'], at['entries-read']
if added and not read then return {0, 1, 0, {}} end
if is_inexact(added) then added, read = nil, nil end
if added and added - read > info['length'] and #redis.call('XRANGE', key, '-', last, 'COUNT', 1) == 0 then
  return {0, 1, 0, {}}
end
local room, bytes, count, full = tonumber(ARGV[5]), 0, 0, 0
for page in pages(key, '(' .. last, ARGV[3], tonumber(ARGV[4])) do
  for _, entry in ipairs(page) do
    local size = size_of(entry)
    if bytes + size > room and not (count == 0 and ARGV[6] == '1') then full = 1 break end
    bytes, count = bytes + size, count + 1
  end
  if full == 1 then break end
end
if count == 0 then return {full, 0, 0, {}} end
-- Another client has set the count so high that these entries could not exist.
if added and added - read < count then return {0, 1, 0, {}} end
local ids = {}
for _, entry in ipairs(redis.call('XREADGROUP', 'GROUP', group, name, 'COUNT', count, 'STREAMS', key, '>')[1][2]) do
  ids[#ids + 1] = entry[1]
end
if read then
  -- Redis stops counting if a later entry was deleted, and then losses could not be detected. The text of a large
  -- number has an exponent by default. Whatever happens here, the entries are claimed.
  redis.pcall('XGROUP', 'SETID', key, group, ids[#ids], 'ENTRIESREAD', string.format('%.0f', read + #ids))
end
return {full, 0, bytes, ids}
"""
)

# The server's time in milliseconds.
TIME = """
local time = redis.call('TIME')
return time[1] * 1000 + math.floor(time[2] / 1000)
"""

# Move the entries among ARGV[10..] that the name ARGV[2] holds, and that were idle for ARGV[4] ms and since the
# server's time ARGV[9] in ms (if given), to the name ARGV[3], up to ARGV[5] bytes (with ARGV[6], at least one entry of
# any size). With ARGV[7], earlier deliveries do not count, because they were to clients of another kind. Nothing is
# moved if the sentinel ARGV[8] is not in the group.
# Returns {is full, bytes, ids that were moved, ids that are no longer in the stream and were not moved}.
TAKE_OVER = (
    _SIZE
    + _CHECK_CLAIM_MODE
    + """
local key, group, from, to = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
if not is_in_claim_mode(key, group, ARGV[8]) then return UNCLAIMED end
local idle, room, bytes, full, moved, gone = tonumber(ARGV[4]), tonumber(ARGV[5]), 0, 0, {}, {}
if ARGV[9] ~= '' then
  local time = redis.call('TIME')
  idle = math.max(idle, time[1] * 1000 + math.floor(time[2] / 1000) - tonumber(ARGV[9]))
end
for index = 10, #ARGV do
  local id = ARGV[index]
  local held = redis.call('XPENDING', key, group, id, id, 1)[1]
  if held and held[2] == from and held[3] >= idle then
    local entry = redis.call('XRANGE', key, id, id)[1]
    if not entry then
      gone[#gone + 1] = id
    else
      local size = size_of(entry)
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
)

# The heartbeat: reset the idle time of one page of entries that the name ARGV[2] still holds, from ARGV[3] on. Returns
# the start of the next page. Trimmed entries are skipped: XCLAIM would drop them, and their loss would not be detected.
# So a read that returns nothing also resets the idle time of the name itself.
TOUCH = """
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

# Release the entries that the name ARGV[2] holds, from ARGV[3] on: any member can take them over immediately, and this
# delivery does not count.
RELEASE = """
local page = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], '+', ARGV[4], ARGV[2])
if #page == 0 then return false end
for _, held in ipairs(page) do
  if #redis.call('XRANGE', KEYS[1], held[1], held[1]) > 0 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, held[1], 'IDLE', ARGV[5], 'RETRYCOUNT',
      math.max(0, math.min(held[4], 2 ^ 53) - 1), 'JUSTID')
  end
end
return '(' .. page[#page][1]
"""

# Remove the consumer ARGV[2] unless it holds an entry.
REMOVE_CONSUMER = """
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then return 0 end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
return 1
"""

# Create the group ARGV[1] after the id ARGV[2], and with ARGV[3] also the stream. Entries that are already removed do
# not count as lost: if the group starts before the first entry or after the last one, the number of read entries is
# known. With ARGV[4], removed entries count as lost: no entry counts as read.
CREATE_GROUP = (
    _FIELDS
    + _IS_INEXACT
    + """
local key, start, command = KEYS[1], ARGV[2], {'XGROUP', 'CREATE', KEYS[1], ARGV[1], ARGV[2]}
if ARGV[3] == '1' then command[6] = 'MKSTREAM' end
local made = redis.pcall(unpack(command))
if made.err then return made end
local info = fields(redis.call('XINFO', 'STREAM', key))
local added, read = info['entries-added'], nil
if added and ARGV[4] == '1' then
  read = 0
elseif is_inexact(added) then
  return 1
elseif added and (start == '$' or #redis.call('XRANGE', key, '(' .. start, '+', 'COUNT', 1) == 0) then
  read = added
elseif added and #redis.call('XRANGE', key, '-', start, 'COUNT', 1) == 0 then
  read = added - info['length']
end
if read then redis.call('XGROUP', 'SETID', key, ARGV[1], start, 'ENTRIESREAD', string.format('%.0f', read)) end
return 1
"""
)

# Count entries that were trimmed unread as read, unless another client has moved or counted the group meanwhile.
# ARGV: the group, its expected position, its expected count (empty if unknown), and the new count (empty to forget it).
COUNT_AS_READ = (
    _FIELDS
    + """
for _, listed in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local info = fields(listed)
  -- As numbers: the text of a large one has an exponent. An unknown count is nil, or false.
  local is_same = (info['entries-read'] or nil) == tonumber(ARGV[3])
  if info['name'] == ARGV[1] and info['last-delivered-id'] == ARGV[2] and is_same then
    local command = {'XGROUP', 'SETID', KEYS[1], ARGV[1], ARGV[2]}
    if ARGV[4] ~= '' then command[6], command[7] = 'ENTRIESREAD', ARGV[4] end
    redis.call(unpack(command))
    return 1
  end
end
return 0
"""
)

# Set the group ARGV[1] to the id ARGV[3] (and the count ARGV[4]), unless it is in claim mode, which the sentinel
# ARGV[2] marks: a late run of another mode would deliver entries a second time. With ARGV[5], the switch to claim mode
# itself sets the position, and adds the sentinel.
SET_POSITION = """
local made = redis.call('XGROUP', 'CREATECONSUMER', KEYS[1], ARGV[1], ARGV[2])
if made == 0 and ARGV[5] == '0' then return 0 end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
local command = {'XGROUP', 'SETID', KEYS[1], ARGV[1], ARGV[3]}
if ARGV[4] ~= '' then command[6], command[7] = 'ENTRIESREAD', ARGV[4] end
redis.call(unpack(command))
if ARGV[5] == '1' then redis.call('XGROUP', 'CREATECONSUMER', KEYS[1], ARGV[1], ARGV[2]) end
return 1
"""

# Lua: deliver entries once more. KEYS[2], if given, is a hash with the time in milliseconds of the first delivery of
# entries. It is written only when an entry is touched or delivered again, because until then Redis itself stores the
# time.
_RECEIVED = """
local key, times, group, consumer = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function first(id, idle)
  if not times then return string.format('%.0f', now - idle) end
  redis.call('HSETNX', times, id, string.format('%.0f', now - idle))
  redis.call('PEXPIRE', times, 604800000)
  return redis.call('HGET', times, id)
end
-- Removed entries stay pending: XCLAIM would drop them, and their loss would not be detected.
local function deliver(held)
  local id = held[1]
  local received = first(id, held[3])
  if #redis.call('XRANGE', key, id, id) == 0 then return {id, held[4], received, false} end
  local claimed = redis.call('XCLAIM', key, group, consumer, 0, id)[1]
  return {id, math.min(held[4], 2 ^ 53) + 1, received, claimed[2]}
end
"""

# Deliver to the consumer at most ARGV[5] entries that were idle for ARGV[3] ms, searching ARGV[6] pending entries from
# ARGV[4] on. With ARGV[7], entries that the consumer holds are left out.
# Returns {where to continue or '' at the end, now, {id, deliveries, first received, fields} of each}.
RECLAIM = (
    _RECEIVED
    + """
local page = redis.call('XPENDING', key, group, ARGV[4], '+', ARGV[6])
local found, after = {}, ''
for _, held in ipairs(page) do
  if #found == tonumber(ARGV[5]) then break end
  after = '(' .. held[1]
  local is_wanted = ARGV[7] ~= '1' or held[2] ~= consumer
  if is_wanted and held[3] >= tonumber(ARGV[3]) then found[#found + 1] = deliver(held) end
end
if #page < tonumber(ARGV[6]) and (#page == 0 or after == '(' .. page[#page][1]) then after = '' end
return {after, now, found}
"""
)

# Deliver the entry ARGV[3] to the consumer once more, if it holds the entry. Returns the same as RECLAIM.
REDELIVER = (
    _RECEIVED
    + """
local held = redis.call('XPENDING', key, group, ARGV[3], ARGV[3], 1, consumer)[1]
return {'', now, held and {deliver(held)} or {}}
"""
)

# Reset the idle time of the entries among ARGV[3..] that the consumer holds.
TOUCH_ENTRIES = (
    _RECEIVED
    + """
local touched = 0
for index = 3, #ARGV do
  local id = ARGV[index]
  local held = redis.call('XPENDING', key, group, id, id, 1, consumer)[1]
  if held and #redis.call('XRANGE', key, id, id) > 0 then
    first(id, held[3])
    redis.call('XCLAIM', key, group, consumer, 0, id, 'JUSTID')
    touched = touched + 1
  end
end
return touched
"""
)
