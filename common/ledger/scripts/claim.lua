-- claim: hand queued samples to one attempt each, under a lease.
-- KEYS: state done attempts queued leases owners payloads
-- ARGV: owner lease_ms indices...
-- ANSWERS: two lists, one entry an index: the attempt (a number) or the word that says why there is none, and the payload.
--   done: a record or a reject exists; leased: another attempt has it, or this call named the index before; paused;
--   capped: no room under the cap, or the dataset is closed; unknown: not queued here
-- An attempt is the time of its claim in milliseconds, or one more than the sample's last: it only grows, also when
-- the ledger was lost and built anew, so that of two records of one sample the higher attempt is always the one that counts.
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local dataset = redis.call('HMGET', KEYS[1], 'state', 'room')
local indices = {unpack(ARGV, 3)}
local queued = redis.call('ZMSCORE', KEYS[4], unpack(indices))
local leased = redis.call('ZMSCORE', KEYS[5], unpack(indices))
local payloads = redis.call('HMGET', KEYS[7], unpack(indices))
local closed = nil
if dataset[1] == 'paused' then closed = 'paused' elseif dataset[1] ~= 'open' then closed = 'capped' end
local room = tonumber(dataset[2] or '0')
local words, taken, leases, owners, handed, seen = {}, {}, {}, {}, {}, {}
for i, index in ipairs(indices) do
  handed[i] = ''
  if redis.call('GETBIT', KEYS[2], index) == 1 then
    words[i] = 'done'
    if queued[i] then taken[#taken + 1] = index end
  elseif leased[i] or seen[index] then
    words[i] = 'leased'
  elseif not queued[i] or not payloads[i] then
    words[i] = 'unknown'
  elseif closed or room <= 0 then
    words[i] = closed or 'capped'
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
  end
end
if #taken > 0 then redis.call('ZREM', KEYS[4], unpack(taken)) end
if #leases > 0 then
  redis.call('ZADD', KEYS[5], unpack(leases))
  redis.call('HSET', KEYS[6], unpack(owners))
  redis.call('HSET', KEYS[1], 'room', room)
end
return {words, handed}
