-- claim: hand queued samples to one attempt each, under a lease.
-- KEYS: state done attempts queued leases owners payloads tries suspects
-- ARGV: owner lease_ms suspect_after alone_ms indices...
--   suspect_after: a sample that lost so many attempts is a suspect: it may be what kills its workers
--   alone_ms: how long after its claim a suspect is alone: its owner gets no other
-- ANSWERS: two lists, one entry an index: the attempt (a number) or the word that says why there is none, and the payload.
--   done: a record or a reject exists; leased: another attempt has it, or this call named the index before; paused;
--   capped: no room under the cap, or the dataset is closed; unknown: not queued here
--   alone: a suspect, and its owner has one already, of this dataset or another; it stays queued, to be sent at once
-- A suspect is noted until it ends, or is renewed when alone_ms are over: only then it is known that its owner outlived
-- them. Another process may bear the name of a dead owner, so its claims do not say so. No note holds for longer than
-- the lease, unrenewed, does: one whose sample the ledger has forgotten holds up no other.
-- An attempt is the time of its claim in milliseconds, or one more than the sample's last: it only grows, also when
-- the ledger was lost and built anew, so that of two records of one sample the higher attempt is always the one that counts.
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local dataset = redis.call('HMGET', KEYS[1], 'state', 'room')
local indices = {unpack(ARGV, 5)}
local queued = redis.call('ZMSCORE', KEYS[4], unpack(indices))
local leased = redis.call('ZMSCORE', KEYS[5], unpack(indices))
local payloads = redis.call('HMGET', KEYS[7], unpack(indices))
local tries = redis.call('HMGET', KEYS[8], unpack(indices))
local has_suspect = false
for _, note in ipairs(redis.call('HVALS', KEYS[9])) do
  local alone_until, owner = string.match(note, '^(%d+) (.*)$')
  if owner == ARGV[1] and alone_until + ARGV[2] > now then has_suspect = true end
end
local closed = nil
if dataset[1] == 'paused' then closed = 'paused' elseif dataset[1] ~= 'open' then closed = 'capped' end
local room = tonumber(dataset[2] or '0')
local words, taken, refused, leases, owners, handed, seen = {}, {}, {}, {}, {}, {}, {}
for i, index in ipairs(indices) do
  handed[i] = ''
  local is_suspect = tonumber(tries[i] or '0') >= tonumber(ARGV[3])
  if redis.call('GETBIT', KEYS[2], index) == 1 then
    words[i] = 'done'
    if queued[i] then taken[#taken + 1] = index end
  elseif leased[i] or seen[index] then
    words[i] = 'leased'
  elseif not queued[i] or not payloads[i] then
    words[i] = 'unknown'
  elseif closed or room <= 0 or (is_suspect and has_suspect) then
    words[i] = closed or (room <= 0 and 'capped') or 'alone'
    refused[#refused + 1] = string.format('%.17g', (index + 1) / 2 ^ 40)
    refused[#refused + 1] = index
  else
    local last = redis.call('GETRANGE', KEYS[3], index * 6, index * 6 + 5)
    local attempt = now
    if #last == 6 then attempt = math.max(now, struct.unpack('>I6', last) + 1) end
    redis.call('SETRANGE', KEYS[3], index * 6, struct.pack('>I6', attempt))
    room = room - 1
    words[i] = attempt
    handed[i] = payloads[i]
    taken[#taken + 1] = index
    seen[index] = true
    leases[#leases + 1] = now + tonumber(ARGV[2])
    leases[#leases + 1] = index
    owners[#owners + 1] = index
    owners[#owners + 1] = ARGV[1]
    if is_suspect then
      has_suspect = true
      redis.call('HSET', KEYS[9], KEYS[5] .. ' ' .. index, now + ARGV[4] .. ' ' .. ARGV[1])
    end
  end
end
-- Their message is gone: the keeper sends another when they may be claimed.
if #refused > 0 then redis.call('ZADD', KEYS[4], 'XX', unpack(refused)) end
if #taken > 0 then redis.call('ZREM', KEYS[4], unpack(taken)) end
if #leases > 0 then
  redis.call('ZADD', KEYS[5], unpack(leases))
  redis.call('HSET', KEYS[6], unpack(owners))
  redis.call('HSET', KEYS[1], 'room', room)
  redis.call('HINCRBY', KEYS[1], 'starts', #owners / 2)
end
return {words, handed}
